"""Schedules in any order: families of models with steps that are right for them, drawn at random or pair by pair."""
