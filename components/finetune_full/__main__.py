from crosstrain.components.core.step import main

main("finetune_full")
