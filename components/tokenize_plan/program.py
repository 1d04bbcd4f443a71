"""Planning: the units and the tokenizer of one piece of work, before several partitions do it."""

from crosstrain.components.core.artifact import Artifact, ArtifactWriter
from crosstrain.components.core.manifest import PlanFacts
from crosstrain.components.core.step import Result
from crosstrain.components.core.tokenizer import load_tokenizer
from crosstrain.components.tokenize.config import Config as TokenizeConfig
from crosstrain.components.tokenize.preparing import prepare_tokenizer, probe_texts
from crosstrain.components.tokenize.reading import plan_units
from crosstrain.components.tokenize_plan.config import Config

COMPONENT = "tokenize_plan"


def run(config: Config) -> Result:
    """Plan the work.

    Raises:
        FileNotFoundError: the corpus, or the tokenizer, is not there.
        ValueError: the corpus holds nothing to train a tokenizer on, or the tokenizer has no EOS.
    """
    corpus = Artifact.open(config.corpus, "corpus")
    inputs = {name: Artifact.open(uri) for name, uri in config.artifacts().items()}
    work = TokenizeConfig.decode(config.model_dump(exclude={"partitions"}), where=COMPONENT)
    units = plan_units(corpus.manifest, config.unit_bytes)
    partitions = max(1, min(config.partitions, len(units)))
    with ArtifactWriter(config.output) as out:
        folder = out.staging / "tokenizer"
        prepare_tokenizer(work, corpus, units, folder)
        tokenizer = load_tokenizer(folder, probe_texts(work, corpus, units), config.engine)
        out.add_folder(folder, "tokenizer/")
        facts = PlanFacts(tokenizer=tokenizer.facts(), units=len(units), partitions=partitions)
        artifact = out.commit(COMPONENT, facts, config.options(), inputs)
    return Result(artifact, {"units": len(units), "partitions": partitions, "vocab_size": tokenizer.vocab_size})
