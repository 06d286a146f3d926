"""What a request asks of its output's form: `reader` reads the fields, `checker` compiles before admission."""
