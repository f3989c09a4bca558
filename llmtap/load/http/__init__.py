"""Send one HTTP request and read its response."""
