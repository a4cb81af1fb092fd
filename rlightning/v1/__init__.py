"""Messages generated from `protos/rlightning/v1` by `make protos`; never edited by hand."""
