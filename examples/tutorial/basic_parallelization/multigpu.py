"""All GPUs of this machine, the processes started from the program itself (as with torch.multiprocessing.spawn).

    python multigpu.py --total_epochs 50 --save_every 10 --batch_size 32

`--nproc 2` says another number; without a GPU it is then processes on the CPU.
"""

from __future__ import annotations

from singlegpu import arguments, train

import worldsize as ws

if __name__ == "__main__":
    parser = arguments("runs/multigpu")
    parser.add_argument("--nproc", default="auto", help="processes: a number, gpu, cpu, or auto (GPUs, else one)")
    args = parser.parse_args()
    ws.spawn(train, args.nproc, (args.total_epochs, args.save_every, args.batch_size, args.run_dir))
