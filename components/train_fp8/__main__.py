from crosstrain.components.core.step import main

main("train_fp8")
