"""The papers' tables and figures beside ours: what is printed, what we get, the difference, what is open."""

from __future__ import annotations

from raypfl.paper.definition import Definition, Profile, known, read
from raypfl.paper.work import reproduce

__all__ = ["Definition", "Profile", "known", "read", "reproduce"]
