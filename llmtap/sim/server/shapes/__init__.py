"""Requests and answers on the wire, one module for each family of APIs. Pure."""
