"""Read requests and write answers of the simulated server, one module for each family of APIs. Pure."""
