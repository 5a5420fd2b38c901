"""From text files to Megatron's indexed data sets.

`inputs` finds the files, `streams` opens and decompresses them, `records` reads documents from
them (long ones in the `pieces` that fit into memory), `encoding` turns documents into token ids,
`workers` does so in several processes, `dataset` writes Megatron's format, `unfinished` keeps what
a killed run had done, `pipeline` joins them all.
"""
