"""``python -m oled_sim`` is the ``oled-sim`` command."""

from oled_sim.cli.main import main

main()
