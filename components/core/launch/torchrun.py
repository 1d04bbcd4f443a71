"""The command lines that start ranks: torchrun's, and its HyperPod sibling's.

Every launcher is told what it could guess, because the guesses differ: Kubeflow's torch runtime counts only
resources named "gpu" as processes, and a node's host name decides whether it hosts the rendezvous. Nodes wait
for one another for `Timeouts.rendezvous`, not for torchrun's ten minutes (of which its store allows one).
"""

from crosstrain.components.core.launch.job import Job

LOG_FOLDER = "/tmp/torchrun"
"""Where every rank's output is kept in the pod; HyperPod's log monitoring reads it there."""


def rendezvous(seconds: int) -> str:
    """Torchrun's rendezvous settings, so that every kind of wait lasts that long."""
    return f"join_timeout={seconds},read_timeout={seconds},timeout={seconds}"


def shape(nodes: int, processes: int) -> list[str]:
    """Nodes, processes, and every rank's output both to the node's and to a file of its own."""
    return [f"--nnodes={nodes}", f"--nproc-per-node={processes}", "--tee=3", f"--log-dir={LOG_FOLDER}"]


def program(job: Job) -> list[str]:
    """What a rank runs."""
    return ["-m", job.module, *job.arguments]
