"""`build`: a scheduled model becomes an engine, phase by phase."""
