"""Configuration of import_model."""

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import OutputURI, SourceURI


class Config(Base):
    """Take a plain Hugging Face model folder, prefix or hub id in: check it, hash it, write its manifest."""

    source: SourceURI
    """Folder or prefix (path, file://, s3://, minio://) with config.json and safetensors weights; the files
    stay where they are, and must not change afterwards. Or hf://organization/name@commit, which is downloaded and
    copied to the output: the commit in full, no branch or tag; HF_TOKEN and HF_ENDPOINT are heeded."""
    output: OutputURI
    """Where the model manifest is written, and the files of a model of the hub."""
