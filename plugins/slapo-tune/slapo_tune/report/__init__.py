"""What a search found, as tables and pictures."""
