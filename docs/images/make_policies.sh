#!/bin/sh
# Draw docs/images/policies.png, the figure of the README, from the bundled trace.
set -eu
cd "$(dirname "$0")"
table=$(mktemp -d)/results.parquet
oled-sim run --trace nano-gsm8k --policy lru --policy lfu --policy oled --policy ideal \
    --cache 8 --cache 16 --cache 24 --cache 32 --cache 40 --cache 56 --cache 72 --cache 96 --cache 128 \
    --out "$table" > /dev/null
python - "$table" <<'PY'
import sys
from pathlib import Path

import pandas as pd

from oled_sim.plotting.results import draw_capacity
from oled_sim.plotting.style import save

title = "GSM8K prompts, routing of llada2-nano (128 experts per layer), costs of LLaDA2.0-mini on an H200"
save(draw_capacity(pd.read_parquet(sys.argv[1]), title), Path("policies.png"))
PY
