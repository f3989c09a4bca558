"""Send requests on schedule and record their exchanges."""
