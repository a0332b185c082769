#!/bin/sh
# Record the bundled traces of llada2-nano again (on a CPU, about three minutes).
# usage: record.sh FOLDER_WITH_GSM8K_AND_HUMANEVAL
set -eu
prompts=$1
here=$(dirname "$0")
signals="--full-gate --embedding --cosines --redact-prompts"

# One thread: the same machine code then sums in the same order everywhere.
export OMP_NUM_THREADS=1
oled-sim collect --model nano --device cpu --threshold 0.7 $signals --limit 10 \
    --max-new-tokens 128 --prompts "$prompts/gsm8k_test.jsonl" --out "$here/nano-gsm8k" --overwrite
oled-sim collect --model nano --device cpu --threshold 0.7 $signals --limit 8 \
    --max-new-tokens 96 --prompts "$prompts/humaneval.jsonl.gz" --out "$here/nano-humaneval" --overwrite
(cd "$here" && find nano-* mini-* -type f | LC_ALL=C sort | xargs sha256sum > SHA256SUMS)
