"""The schedule: its steps, applied in transactions, kept as records, explained, saved and replayed."""
