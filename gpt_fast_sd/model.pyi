from model import *
