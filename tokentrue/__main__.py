from tokentrue.cli.main import main

main()
