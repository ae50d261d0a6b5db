"""From a model with cuts to its stages: one recording, a straight line, cut after the modules that steps named."""
