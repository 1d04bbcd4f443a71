from crosstrain.components.core.step import main

main("tokenize_partition")
