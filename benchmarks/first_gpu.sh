#!/usr/bin/env bash
# What no machine of ours could run, in about an hour on one GPU with 24 GB: CodeSearchNet's Ruby and UniXcoder from the
# Hub, InfoNCE against Soft-InfoNCE with each estimator of the paper, three seeds each, a stopped and resumed run, and a
# push to a private repository. The last step prints one page against the paper's table.
#
#     hf auth login
#     bash benchmarks/first_gpu.sh USER/NAME [OPTION=VALUE ...]
#
# USER/NAME is the private repository. The options go to every run, for example num_train_epochs=30 as in the paper, or
# bf16=false for a GPU without it. Given again, the same command goes on where it stopped.
set -euo pipefail

repository=${1:?name the private repository: bash benchmarks/first_gpu.sh USER/NAME}
options=(num_train_epochs=10 bf16=true "${@:2}")
tools=$(dirname "$0")
folder=outputs/first-gpu
methods=unixcoder-infonce,unixcoder-bm25,unixcoder-trained_model,unixcoder-simcse
study=(python -m soft_trainer.cli study --config paper/overall --output_dir "$folder/runs" --only "$methods" --set "${options[@]}")

title() {
  printf '\n==== %s ====\n' "$1"
}

title "1 of 7: the machine"
nvidia-smi || echo "no NVIDIA GPU: this will take days"
python -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
df -h . | tail -n 1

title "2 of 7: the rows, from the Hub"
python "$tools/first_gpu.py" rows "$folder"

title "3 of 7: the SimCSE encoder, on Ruby's queries alone"
if [ ! -e outputs/simcse/modules.json ]; then
  python "$tools/../examples/simcse.py" "$folder/rows" outputs/simcse \
    --max_steps "${SIMCSE_STEPS:-900}" --batch_size "${SIMCSE_BATCH:-256}"
fi

title "4 of 7: the runs"
"${study[@]}" --dry_run
"${study[@]}"

title "5 of 7: seconds per step, memory, the share of the weights"
python "$tools/first_gpu.py" steps "$folder"

title "6 of 7: a run that is stopped and resumed, against one that is not"
python "$tools/first_gpu.py" resume "$folder"

title "7 of 7: a private push"
python -m soft_trainer.cli push "$folder/runs/unixcoder-bm25/1234" "$repository" --private
python "$tools/first_gpu.py" pushed "$folder" "$repository"

python "$tools/first_gpu.py" page "$folder"
