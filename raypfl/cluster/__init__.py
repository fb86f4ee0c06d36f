"""Clusters beside a run: several nodes on one machine, and jobs that are sent to a cluster."""
