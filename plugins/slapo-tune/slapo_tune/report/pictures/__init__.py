"""The search as pictures; they need matplotlib, which the extra ``draw`` installs."""
