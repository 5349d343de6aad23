"""Fine-tune or pre-train a language model: `worldsize llm train` as a program that every launcher starts.

worldsize run --nproc-per-node 2 train.py --init_ckpt ... --data_path ... --output_dir ...
deepspeed --num_gpus 2 train.py ...
torchrun --nproc-per-node 2 train.py ...
srun python train.py ...
"""

from __future__ import annotations

import sys

from worldsize.cli.main import main

if __name__ == "__main__":
    main(["llm", "train", *sys.argv[1:]])
