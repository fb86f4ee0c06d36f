"""Sweeps: many runs over a space of configurations, on Ray Tune; the only place that knows of it."""
