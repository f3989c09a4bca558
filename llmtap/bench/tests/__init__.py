"""The ten tests of the IETF draft and the parts that only they use."""
