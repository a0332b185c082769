"""Offloading policies, one file each."""
