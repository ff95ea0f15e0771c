"""apex.contrib.focal_loss: a package whose `focal_loss` is a module."""

from apex.contrib.focal_loss import focal_loss

__all__ = ["focal_loss"]
