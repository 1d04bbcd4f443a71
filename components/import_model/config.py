"""Configuration of import_model."""

from crosstrain.components.core.config import Config as Base
from crosstrain.components.core.config import OutputURI, SourceURI


class Config(Base):
    """Take a plain Hugging Face model folder or prefix in, by reference: check it, hash it, write its manifest."""

    source: SourceURI
    """Folder or prefix (path, file://, s3://, minio://) with config.json and safetensors weights; the files
    stay where they are, and must not change afterwards."""
    output: OutputURI
    """Where the model manifest is written."""
