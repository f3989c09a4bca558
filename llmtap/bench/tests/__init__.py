"""The ten tests of the IETF draft, a module each, and what two or more of them share (`mixes`, `paired`)."""
