"""From text files to Megatron's indexed data sets.

`inputs` finds and reads records, `encoding` turns them into token ids (in worker processes),
`dataset` writes the ids with Megatron's own builder, `pipeline` joins the three.
"""
