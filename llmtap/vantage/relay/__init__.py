"""The relay process: accepts clients, forwards their requests to the gateway, and timestamps every read."""
