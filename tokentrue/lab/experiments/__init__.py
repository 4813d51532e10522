"""The experiments, one file each; `tokentrue.lab.catalog` lists them with their claims."""
