"""Write-behind: writes the router's records into the state store asynchronously."""
