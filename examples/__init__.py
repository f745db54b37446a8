"""Small programs that use Tokenwire as its users do."""
