#!/usr/bin/env bash
# From nothing to a comparison: environment, texts, tokenizer, rows, trainings, CORE, samples, report.
#
#   bash speedrun.sh         on a CPU: a small looped model with both input gains and its flat twin, on the
#                            source of Python's library; minutes, offline
#                            on GPUs: the same at 140M on 11.2B tokens of FineWeb-Edu, on all GPUs
#   bash speedrun.sh setup   the environment only
#
# Run again, it continues where it stopped. Settings, e.g. DATA=my/texts TOKENS=3e6 bash speedrun.sh:
#   DATA    stdlib, fineweb-edu, or a folder of .parquet (column text), .jsonl (key text) or .txt files
#   PRESET  network and recipe (nano; on GPUs parcae-140m); train.py --help lists them
#   ARMS    one run each, else identical: euler, zoh, flat (no loop)
#   TOKENS  of each training (the preset's)
#   SEED    of weights, row order, depths and initial states (0)
#   RUN     results go to runs/RUN (PRESET-DATA-sSEED)
#   BUNDLE  CORE task data, a zip (on GPUs it is fetched)
#   FLAGS   handed to every training, e.g. FLAGS="--wandb --core-every 2000"
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-}" in "" | setup) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' speedrun.sh; exit ;; esac
say() { printf '\n[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

# the machine, and what is trained on it: one process a GPU, or a core
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$GPUS" -gt 0 ]; then
    WORKERS=$GPUS PRESET=${PRESET:-parcae-140m} DATA=${DATA:-fineweb-edu}
else
    WORKERS=$(getconf _NPROCESSORS_ONLN) PRESET=${PRESET:-nano} DATA=${DATA:-stdlib}
fi
ARMS=${ARMS:-euler flat zoh} SEED=${SEED:-0} RUN=${RUN:-$PRESET-$(basename "$DATA")-s$SEED}
for PROCESSES in 8 4 2 1; do [ "$PROCESSES" -gt "$WORKERS" ] || break; done
VOCAB=32768 SEQ=2048 LONG=crop ALL=11.2e9 # entries of the tokenizer, tokens a row, long documents
case "$PRESET" in
*nano) VOCAB=1024 SEQ=256 LONG=split ALL=6.9e6 ;;
*rdm*) VOCAB=65536 ALL=10e9 ;;
*370m) ALL=29.6e9 ;;
*770m) ALL=61.6e9 ;;
*1.3b) ALL=104e9 ;;
esac
WORK=data/$(basename "$DATA")-v$VOCAB ROWS=$WORK/rows-$SEQ-$LONG OUT=runs/$RUN TOKENS=${TOKENS:-$ALL}
PY=.venv/bin/python

# environment: .venv with the versions pinned in pyproject.toml
if ! cmp -s pyproject.toml .venv/pyproject.toml; then
    say "environment: packages are fetched into .venv"
    python3 -m venv .venv
    CPU_TORCH=$(grep -o 'torch==[0-9.]*' pyproject.toml)+cpu
    [ "$GPUS" -gt 0 ] || $PY -m pip install --no-deps --retries 0 "$CPU_TORCH" --extra-index-url https://download.pytorch.org/whl/cpu || true
    $PY -m pip install -e ".[dev,studies]"
    cp pyproject.toml .venv/pyproject.toml
fi
[ "${1:-}" != setup ] || exit 0
trap '[ $? -eq 0 ] || echo "speedrun.sh: ended early; the same command continues, RUN=another begins anew"' EXIT

# texts
say "texts: $DATA"
TEXTS=data/$DATA DOWNLOAD= PROMPT="The history of"
case "$DATA" in
stdlib) PROMPT="def __init__(self"; $PY dataloader.py stdlib --out $TEXTS ;;
fineweb-edu) # a shard is about 53M tokens, of which packing crops up to 40 %; the tokenizer reads 12 shards
    SHARDS=$(printf '%.0f' "$TOKENS" | awk '{n = int($1 / 31e6) + 2; print n < 12 ? 12 : n > 1822 ? 1822 : n}')
    $PY dataloader.py download --out $TEXTS --shards 12
    $PY dataloader.py download --out $TEXTS --shards "$SHARDS" &
    DOWNLOAD=$!
    ;;
*) TEXTS=$DATA ;;
esac
say "tokenizer: byte-level BPE with $VOCAB entries"
mkdir -p "$WORK" "$OUT"
$PY tokenizer_train.py --texts "$TEXTS" --vocab-size $VOCAB --out "$WORK/tokenizer.json"
wait $DOWNLOAD # its error ends the run
say "rows: $SEQ + 1 tokens each"
$PY dataloader.py pack --texts "$TEXTS" --tokenizer "$WORK/tokenizer.json" --seq-len $SEQ --long-docs $LONG --out "$ROWS"

# trainings, one after the other, each on all GPUs or cores
launch=("$PY" -m torch.distributed.run --standalone --local-addr=localhost "--nproc_per_node=$PROCESSES")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
runs=()
for arm in $ARMS; do
    say "training: $arm"
    network=(--preset "$PRESET" --gain "$arm")
    [ "$arm" != flat ] || network=(--preset "transformer-${PRESET#parcae-}")
    # shellcheck disable=SC2086 # FLAGS are words
    "${launch[@]}" train.py "${network[@]}" --data "$ROWS" --out "$OUT/$arm" --seed "$SEED" --tokens "$TOKENS" --resume ${FLAGS:-}
    runs+=("$OUT/$arm")
done

# CORE, on a CPU 20 examples a task where its data is given; three samples; the comparison
few=(--max-per-task 20 --seeds 1234)
[ "$GPUS" -eq 0 ] || few=()
for run in "${runs[@]}"; do
    if [ "$GPUS" -gt 0 ] || [ -n "${BUNDLE:-}" ]; then
        say "CORE: $run"
        "${launch[@]}" core_eval.py "$run" ${BUNDLE:+--bundle "$BUNDLE"} "${few[@]}"
    fi
    say "samples: $run"
    $PY -m tools.sample "$run" --prompt "$PROMPT" --num 3 --max-tokens 64
done
say "report"
$PY -m tools.report "${runs[@]}" --out "$OUT"
say "picture: $OUT/depth.png; next: edit model.py, then python -m tools.ablate"
