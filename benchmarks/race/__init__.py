"""The race: seconds and updates to target losses, all in turns. See ``benchmarks/race.py``."""
