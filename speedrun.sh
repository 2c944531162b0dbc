#!/usr/bin/env bash
# From nothing to a comparison: environment, texts, tokenizer, rows, trainings, CORE, samples, report.
#
#   bash speedrun.sh            on a CPU: a small looped model with both input gains and its flat twin, on the
#                               source of Python's library; minutes, offline
#                               on GPUs: the same arms at 140M on 11.2B tokens of FineWeb-Edu, on all GPUs
#   bash speedrun.sh setup      the environment only
#
# Settings, e.g. DATA=my/texts TOKENS=3e6 bash speedrun.sh:
#   DATA    stdlib, fineweb-edu, or a folder of .parquet (column text), .jsonl (key text) or .txt files
#   PRESET  network and recipe (nano; on GPUs parcae-140m); train.py --help lists them
#   ARMS    a training each, alike in all else: euler, zoh, flat (no loop)
#   TOKENS  of each training (the preset's)
#   SEED    of weights, row order, depths and initial states (0)
#   RUN     results go to runs/RUN (PRESET-DATA-sSEED)
#   BUNDLE  CORE task data, a zip (on GPUs it is fetched)
#   FLAGS   handed to every training, e.g. FLAGS="--wandb --core-every 2000"
#
# Run again, it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-}" in "" | setup) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' speedrun.sh; exit ;; esac
say() { printf '\n[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

# the machine, and what is trained on it
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [ "$GPUS" -gt 0 ]; then
    PRESET=${PRESET:-parcae-140m} DATA=${DATA:-fineweb-edu} WORKERS=$GPUS
else
    PRESET=${PRESET:-nano} DATA=${DATA:-stdlib} WORKERS=$(getconf _NPROCESSORS_ONLN)
fi
ARMS=${ARMS:-euler flat zoh} SEED=${SEED:-0} RUN=${RUN:-$PRESET-$(basename "$DATA")-s$SEED}
case "$PRESET" in # entries of the tokenizer, tokens a row, rows a batch, long documents, training tokens
*nano) VOCAB=1024 SEQ=256 BATCH=16 LONG=split ALL=6.9e6 ;;
*rdm*) VOCAB=65536 SEQ=2048 BATCH=256 LONG=crop ALL=10e9 ;;
*370m) VOCAB=32768 SEQ=2048 BATCH=256 LONG=crop ALL=29.6e9 ;;
*770m) VOCAB=32768 SEQ=2048 BATCH=256 LONG=crop ALL=61.6e9 ;;
*1.3b) VOCAB=32768 SEQ=2048 BATCH=256 LONG=crop ALL=104e9 ;;
*) VOCAB=32768 SEQ=2048 BATCH=256 LONG=crop ALL=11.2e9 ;;
esac
TOKENS=${TOKENS:-$ALL}
for PROCESSES in 8 7 6 5 4 3 2 1; do # one a GPU, or a core
    [ "$PROCESSES" -gt "$WORKERS" ] || [ $((BATCH % PROCESSES)) -ne 0 ] || break
done
WORK=data/$(basename "$DATA")-v$VOCAB ROWS=$WORK/rows-$SEQ-$LONG OUT=runs/$RUN

# environment: .venv with the versions pinned in pyproject.toml
if ! cmp -s pyproject.toml .venv/pyproject.toml; then
    say "environment: packages are fetched into .venv"
    python3 -m venv .venv
    CPU_TORCH=$(grep -o 'torch==[0-9.]*' pyproject.toml)+cpu
    [ "$GPUS" -gt 0 ] || .venv/bin/pip install --no-deps --retries 0 "$CPU_TORCH" --extra-index-url https://download.pytorch.org/whl/cpu || true
    .venv/bin/pip install -e ".[dev,studies]"
    cp pyproject.toml .venv/pyproject.toml
fi
[ "${1:-}" != setup ] || exit 0
PY=.venv/bin/python
mkdir -p "$WORK" "$OUT"
trap '[ $? -eq 0 ] || echo "speedrun.sh: ended early; the same command continues"' EXIT

# texts
case "$DATA" in
stdlib)
    say "texts: the source of this Python's standard library"
    TEXTS=data/stdlib
    $PY dataloader.py stdlib --out $TEXTS
    ;;
fineweb-edu) # a shard is about 53M tokens, of which packing crops up to 40 %; the tokenizer reads 12 shards at most
    TEXTS=data/fineweb-edu
    SHARDS=$(printf '%.0f' "$TOKENS" | awk '{n = int($1 / 31e6) + 2; print n < 12 ? 12 : n > 1822 ? 1822 : n}')
    say "texts: $SHARDS shards of FineWeb-Edu, and the one for validation"
    $PY dataloader.py download --out $TEXTS --shards 12
    $PY dataloader.py download --out $TEXTS --shards "$SHARDS" >"$WORK/download.log" 2>&1 &
    ;;
*) TEXTS=$DATA ;;
esac

say "tokenizer: byte-level BPE with $VOCAB entries"
$PY tokenizer_train.py --texts "$TEXTS" --vocab-size $VOCAB --out "$WORK/tokenizer.json"
wait -n || { code=$?; [ $code -eq 127 ] || { tail -n 3 "$WORK/download.log" >&2; exit $code; }; }

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

# CORE: whole on GPUs; on a CPU 20 examples a task, where its data is given
for run in "${runs[@]}"; do
    [ "$GPUS" -gt 0 ] || [ -n "${BUNDLE:-}" ] || break
    say "CORE: $run"
    few=(--max-per-task 20 --seeds 1234)
    [ "$GPUS" -eq 0 ] || few=()
    "${launch[@]}" core_eval.py "$run" ${BUNDLE:+--bundle "$BUNDLE"} "${few[@]}"
done

# three samples of each arm, then the comparison
prompt="The" && [ "$DATA" != stdlib ] || prompt="def __init__(self"
for run in "${runs[@]}"; do
    say "samples: $run"
    $PY -m tools.sample "$run" --prompt="$prompt" --num 3 --max-tokens 64
done
say "report"
$PY -m tools.report "${runs[@]}" --out "$OUT"
say "next: edit model.py, then python -m tools.ablate"
