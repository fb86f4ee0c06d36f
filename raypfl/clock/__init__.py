"""Virtual time: how long a simulated round takes, and who is there in time. No real clock is read."""

from raypfl.clock.config import VirtualClock
from raypfl.clock.peers import pull_seconds, unanswered
from raypfl.clock.schedule import Schedule, Turn
from raypfl.clock.server import ServerRound, server_round
from raypfl.clock.speeds import Speeds, drops_out, random_order, speeds_of, transfer_seconds

__all__ = [
    "Schedule",
    "ServerRound",
    "Speeds",
    "Turn",
    "VirtualClock",
    "drops_out",
    "pull_seconds",
    "random_order",
    "server_round",
    "speeds_of",
    "transfer_seconds",
    "unanswered",
]
