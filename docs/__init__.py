"""The pages, and in `docs.studies` the programs that write three of them."""
