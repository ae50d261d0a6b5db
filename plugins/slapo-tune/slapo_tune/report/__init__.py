"""What a search found, as tables and pictures: pure functions of a space and its trials."""
