"""Pictures of schedules, as text and as one HTML page: ``sch.picture()``, ``slapo show``."""

from slapo_view.picture import Picture, picture

__all__ = ["Picture", "picture"]
