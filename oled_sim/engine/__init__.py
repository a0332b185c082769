"""The discrete-event engine: residency, lanes, metrics."""
