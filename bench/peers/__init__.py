"""The parts of bench/oracle.py: cases, Silva's side, and a script for each peer that runs in the peer's Python."""
