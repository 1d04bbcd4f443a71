"""Small compiled pipelines of real KFP components, and `crosstrain` as a process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from crosstrain.components.import_data.component import import_data
from crosstrain.components.import_model.component import import_model
from crosstrain.components.merge.component import merge
from crosstrain.components.shard.component import shard
from crosstrain.components.tokenize.component import tokenize
from crosstrain.components.train_fp8.component import train_fp8
from crosstrain.pipelines.compile import compile_function

IMAGE = "python:3.11"


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def make(text: str, data: dsl.Output[dsl.Dataset]):
    """Write a text."""
    from pathlib import Path

    with Path(data.path).open("x") as stream:  # "x": as a step that expects a fresh folder
        stream.write(text)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def use(
    data: dsl.Input[dsl.Dataset],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    mode: str = "good",
) -> str:
    """Read it, or fail as asked."""
    import os
    import signal
    from pathlib import Path

    if mode == "raise":
        raise ValueError("no such luck")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    text = Path(data.path).read_text()
    Path(report.path).write_text(f"<p>{text}</p>")
    metrics.log_metric("length", len(text))
    return text


@dsl.pipeline(name="words")
def words(
    text: str,
    mode: str = "good",
    count: int = 3,
    rate: float = 0.5,
    flag: bool = False,
    items: list = [1, 2],  # noqa: B006
    mapping: dict = {"a": {"b": 1}},  # noqa: B006
    state: str = "",
):
    """Carry words from one step to the next.

    Args:
        text: The words.
        mode: good, raise or kill.
        count: How many.
        rate: A number.
        flag: A choice.
        items: A list.
        mapping: A mapping.
        state: A place.
    """
    made = make(text=text).set_display_name("Make the words")
    used = use(data=made.outputs["data"], mode=mode)
    with dsl.If(used.outputs["Output"] == "never"):
        use(data=made.outputs["data"]).set_display_name("Never")


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def sleep(marker: str, stubborn: bool):
    """Sleep, with a child in a session of its own, an orphan, and perhaps no ear for SIGTERM."""
    import os
    import signal
    import subprocess
    import sys
    import time
    from pathlib import Path

    code = "import signal, sys, time\nif sys.argv[2] == 'True': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "print('ready', flush=True)\ntime.sleep(300)"
    child = subprocess.Popen(
        [sys.executable, "-c", code, marker, str(stubborn)], start_new_session=True, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    subprocess.run(["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(300)' {marker} >/dev/null 2>&1 &"])
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["CROSSTRAIN_RUN_DIR"], "asleep").touch()
    time.sleep(300)


@dsl.pipeline(name="sleeping")
def sleeping(marker: str, stubborn: bool = False):
    """Sleep."""
    sleep(marker=marker, stubborn=stubborn)


@dsl.pipeline(name="crossing")
def crossing(corpus: str, model: str, state: str = "", config: dict = {}):  # noqa: B006
    """Steps of crosstrain's own."""
    import_data(source=corpus, config=config)
    base = import_model(source=model, config=config)
    other = import_model(source="other", config=config)
    merge(model=base.outputs["model"], adapter=other.outputs["model"], config=config)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def theirs(corpus: dsl.Input[dsl.Dataset], clean: dsl.Output[dsl.Dataset], config: dict = {}):  # noqa: B006
    """A component of somebody else's package, made like one of crosstrain's."""
    from crosstrain.components.core.step import run_step

    run_step("acme.steps.clean", inputs={"corpus": corpus}, output=clean, config=config)


@dsl.pipeline(name="cleaning")
def cleaning(corpus: str, config: dict = {}):  # noqa: B006
    """One step of crosstrain's own, and one of a package made like it."""
    taken = import_data(source=corpus, config=config)
    theirs(corpus=taken.outputs["data"], config=config)


@dsl.pipeline(name="importing")
def importing(corpus: str, config: dict = {}):  # noqa: B006
    """One step of crosstrain's own, and one of somebody else's."""
    taken = import_data(source=corpus, config=config)
    use(data=taken.outputs["data"])


@dsl.pipeline(name="tokenizing")
def tokenizing(corpus: str, vocab_size: int = 300):
    """Text to token documents."""
    tokenize(corpus=import_data(source=corpus).outputs["data"], vocab_size=vocab_size)


@dsl.pipeline(name="training")
def training(corpus: str, state: str = "", config: dict = {}):  # noqa: B006
    """Text to a model."""
    tokens = tokenize(corpus=import_data(source=corpus).outputs["data"], vocab_size=300)
    shards = shard(tokens=tokens.outputs["tokens"], sequence_length=32)
    train_fp8(shards=shards.outputs["shards"], preset="debug", precision="fp32", steps=120, state=state, config=config)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def count(number: int, numbers: dsl.Output[dsl.Dataset]) -> list:
    """Count from 0."""
    from pathlib import Path

    Path(numbers.path).write_text(str(number))
    return list(range(number))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def visit(place: int, name: str, note: dsl.Output[dsl.Dataset], metrics: dsl.Output[dsl.Metrics], broken: int = -1):
    """Meet the other iteration that runs now, and leave a note; or die."""
    import os
    import signal
    import time
    from pathlib import Path

    here = Path(os.environ["CROSSTRAIN_RUN_DIR"], "meeting")
    here.mkdir(exist_ok=True)
    (here / f"{name}{place}").touch()
    deadline = time.monotonic() + 20
    while len([path for path in here.iterdir() if path.name[0] == name[0]]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    print("visiting", name, place, flush=True)
    if place == broken:
        os.kill(os.getpid(), signal.SIGKILL)
    with Path(note.path).open("x") as stream:
        stream.write(f"{name} {place}")
    metrics.log_metric("place", place)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def gather(notes: dsl.Input[list[dsl.Dataset]], more: dsl.Input[list[dsl.Dataset]], report: dsl.Output[dsl.HTML]):
    """All notes, in the order of the iterations."""
    from pathlib import Path

    Path(report.path).write_text(", ".join(Path(note.path).read_text() for note in [*notes, *more]))


@dsl.pipeline(name="looping")
def looping(places: list = [3, 4], number: int = 2, broken: int = -1):  # noqa: B006
    """Steps in loops over a parameter, and over what another step makes.

    Args:
        places: Where to go.
        number: How often to count.
        broken: The place where one dies.
    """
    with dsl.ParallelFor(places, name="place") as place:
        first = visit(place=place, name="known", broken=broken).set_display_name("Visit")
    counted = count(number=number)
    with dsl.ParallelFor(counted.outputs["Output"]) as place:
        second = visit(place=place, name="made", broken=broken).set_display_name("Visit again")
    gather(notes=dsl.Collected(first.outputs["note"]), more=dsl.Collected(second.outputs["note"]))


@dsl.pipeline(name="importing-all")
def importing_all(corpora: list, config: dict = {}):  # noqa: B006
    """A step of crosstrain's own in a loop.

    Args:
        corpora: What to import.
        config: Options.
    """
    with dsl.ParallelFor(corpora, name="corpus") as corpus:
        import_data(source=corpus, config=config).set_display_name("Import")


@dsl.container_component
def shell():
    """A container."""
    return dsl.ContainerSpec(image="alpine", command=["echo"], args=["hello"])


@dsl.pipeline(name="containing")
def containing():
    """A container as a step."""
    shell()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name to compiled YAML."""
    folder = tmp_path_factory.mktemp("compiled")
    paths = {}
    functions: list[Any] = [
        words, sleeping, crossing, cleaning, importing, importing_all, containing, use, tokenizing, training, looping,
    ]  # fmt: skip
    for function in functions:
        paths[function.name] = folder / f"{function.name}.yaml"
        paths[function.name].write_bytes(compile_function(function))
    return paths


@pytest.fixture(scope="session")
def command() -> list[str]:
    """`crosstrain`, as the installed script calls it."""
    return [sys.executable, "-P", "-c", "from crosstrain.pipelines.cli import main; main()"]


Crosstrain = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def crosstrain(command: list[str], tmp_path: Path) -> Crosstrain:
    """Run `crosstrain` with these arguments in an empty folder, without a terminal."""

    def call(*arguments: object, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=600,
            **options,
        )

    return call
