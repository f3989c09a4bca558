"""Terminal view of a tap, over the HTTP of its admin port."""
