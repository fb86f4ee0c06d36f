"""Onlookers of a run: figures of its rounds, as they come, for programs that show them."""

from raypfl.watch.base import RunSeen, Watcher, Watchers
from raypfl.watch.choice import check_installed, watchers_of
from raypfl.watch.config import WatchConfig

__all__ = ["RunSeen", "WatchConfig", "Watcher", "Watchers", "check_installed", "watchers_of"]
