#!/usr/bin/env bash
# From nothing to a comparison: environment, texts, tokenizer, rows, trainings, CORE, samples, report.
#
#   bash speedrun.sh         on a CPU: a small looped model with both input gains and its flat twin, on the
#                            source of Python's library; minutes, offline
#                            on GPUs: the same at 140M on 11.2B tokens of FineWeb-Edu, on 8, 4, 2 or 1 of them
#   bash speedrun.sh setup   the environment only
#
# Run again, it continues where it stopped. Settings, e.g. DATA=my/texts TOKENS=3e6 bash speedrun.sh:
#   DATA    stdlib, fineweb-edu, or a folder of .parquet (column text), .jsonl (key text) or .txt files
#   VAL     file of DATA that is the validation (else one document in so many); ALL_FILES=1 trains on files
#           whose names say that they are held out, too
#   PRESET  network and recipe (nano; on GPUs parcae-140m); train.py --help lists them
#   ARMS    one run each, else identical: euler, zoh, flat (no loop)
#   TOKENS  of each training (the preset's)
#   SEED    seed of weights, row order, depths and initial states (0)
#   RUN     results go to runs/RUN (PRESET-DATA-sSEED)
#   BUNDLE  CORE task data, a zip (on GPUs it is fetched)
#   FLAGS   handed to every training, e.g. FLAGS="--wandb"
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-}" in "" | setup) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' speedrun.sh; exit ;; esac
say() { printf '\n[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
PY=.venv/bin/python

# environment: .venv with the versions pinned in pyproject.toml
if ! cmp -s pyproject.toml .venv/pyproject.toml; then
    say "environment: packages are fetched into .venv"
    python3 -m venv .venv
    CPU_TORCH=$(grep -o 'torch==[0-9.]*' pyproject.toml)+cpu
    [ -e /dev/nvidia0 ] || $PY -m pip install --no-deps --retries 0 "$CPU_TORCH" --extra-index-url https://download.pytorch.org/whl/cpu || true
    $PY -m pip install -e ".[dev,studies]"
    cp pyproject.toml .venv/pyproject.toml
fi
[ "${1:-}" != setup ] || exit 0

# the machine, and what is trained on it: one process a GPU, or a core
read -r DEVICE WORKERS < <($PY -c 'import torch, looped.machine as m; print(m.pick_device("auto", 0).type, torch.cuda.device_count())')
if [ "$DEVICE" = cuda ]; then
    PRESET=${PRESET:-parcae-140m} DATA=${DATA:-fineweb-edu} FEW=()
else
    PRESET=${PRESET:-nano} DATA=${DATA:-stdlib} FEW=(--max-per-task 20 --seeds 1234) WORKERS=$(getconf _NPROCESSORS_ONLN)
fi
PROCESSES=8
while [ "$PROCESSES" -gt "$WORKERS" ]; do PROCESSES=$((PROCESSES / 2)); done
ARMS=${ARMS:-euler flat zoh} SEED=${SEED:-0} TEXTS=data/$DATA NAME=$DATA PROMPT="The history of" WHICH=(${VAL:+--val "$VAL"} ${ALL_FILES:+--all-files})
if [ "$DATA" != stdlib ] && [ "$DATA" != fineweb-edu ]; then
    read -r KEY < <($PY -m looped.corpus "$DATA" "${WHICH[@]}") # other where a file is added or changed
    TEXTS=$DATA NAME=$(basename "$DATA")-$KEY
fi
OUT=runs/${RUN:-$PRESET-$NAME-s$SEED}

# whether train.py takes these settings, before anything is fetched
flags() { # of an arm's training
    [ "$1" = flat ] && echo "--preset transformer-${PRESET#parcae-}" || echo "--preset $PRESET --gain $1"
    echo "--out $OUT/$1 --resume --seed $SEED --device $DEVICE ${TOKENS:+--tokens $TOKENS} ${FLAGS:-}"
}
FACTS='import sys, torch, train, looped.machine as m; args = train.parse_args(sys.argv[3:]); cfg = train.model_config(args)
train.settle(args, cfg, m.Rank(0, int(sys.argv[1]), torch.device(sys.argv[2]))); print(cfg.vocab_size, cfg.seq_len, int(args.tokens))'
for arm in $ARMS; do # shellcheck disable=SC2046 # flags are words
    read -r VOCAB SEQ ALL < <($PY -c "$FACTS" "$PROCESSES" "$DEVICE" $(flags "$arm") --data unused)
done
LONG=crop
[ "$SEQ" -gt 256 ] || LONG=split # short rows would lose most of the text
WORK=data/$NAME-v$VOCAB ROWS=data/$NAME-v$VOCAB/rows-$SEQ-$LONG
trap '[ $? -eq 0 ] || echo "speedrun.sh: ended early; the same command continues, RUN=another begins anew"' EXIT

say "texts: $DATA"
DOWNLOAD=
case "$DATA" in
stdlib) PROMPT="def __init__(self"; $PY dataloader.py stdlib --out $TEXTS ;;
fineweb-edu) # a shard is about 53M tokens, of which packing crops up to 40 %; the tokenizer reads 12 shards
    SHARDS=$((ALL / 31000000 + 2))
    $PY dataloader.py download --out $TEXTS --shards 12
    $PY dataloader.py download --out $TEXTS --shards $((SHARDS < 12 ? 12 : SHARDS > 1822 ? 1822 : SHARDS)) &
    DOWNLOAD=$!
    ;;
esac
say "tokenizer: byte-level BPE with $VOCAB entries"
$PY tokenizer_train.py --texts "$TEXTS" "${WHICH[@]}" --vocab-size "$VOCAB" --out "$WORK/tokenizer.json"
wait $DOWNLOAD # its error ends the run
say "rows: $SEQ + 1 tokens each"
$PY dataloader.py pack --texts "$TEXTS" "${WHICH[@]}" --tokenizer "$WORK/tokenizer.json" --seq-len "$SEQ" --long-docs $LONG --out "$ROWS"

# trainings, one after the other, each on all GPUs or cores; CORE, on a CPU of 20 examples a task where its
# data is given; three samples; the comparison
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
launch=("$PY" -m looped.torchrun --standalone --local-addr=localhost "--nproc_per_node=$PROCESSES")
runs=()
for arm in $ARMS; do
    say "training: $arm"
    # shellcheck disable=SC2046
    "${launch[@]}" train.py $(flags "$arm") --data "$ROWS"
    runs+=("$OUT/$arm")
done
for run in "${runs[@]}"; do
    if [ "$DEVICE" = cuda ] || [ -n "${BUNDLE:-}" ]; then
        say "CORE: $run"
        "${launch[@]}" core_eval.py "$run" ${BUNDLE:+--bundle "$BUNDLE"} "${FEW[@]}"
    fi
    say "samples: $run"
    $PY -m tools.sample "$run" --prompt "$PROMPT" --num 3 --max-tokens 64
done
say "report"
$PY -m tools.report "${runs[@]}" --out "$OUT"
say "picture: $OUT/report.png; next: edit model.py, then python -m tools.check and python -m tools.ablate"
