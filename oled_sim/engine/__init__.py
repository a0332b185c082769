"""The simulator: expert pools, lanes, run rules, metrics.

``simulate`` runs one policy, ``simulate_all`` several side by side; see ``docs/architecture.md``.
"""
