"""What our HTTP servers share: their life cycle, the checks of each request, and the access token."""
