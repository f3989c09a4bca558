"""Middleware that measures requests inside an application, and reports to a meter as a relay does."""
