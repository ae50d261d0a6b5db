"""One line a trial, on disk before the next one starts."""
